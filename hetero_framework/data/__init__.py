"""Text and conversations -> micro-batches, with the order and the tokens of Trainer and SFTTrainer.

`load_data(config, load_tokenizer(config)).step_batches(step)` gives the micro-batches of a step. It
is a pure function: a run that resumes at step k asks for step k.
"""
