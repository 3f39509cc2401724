"""Foreign formats: Megatron's indexed data, SentencePiece tokenizers and GGUF files."""
