"""Pictures: classifiers of images by transformers' classes, ResNet among them, cut as chains."""
