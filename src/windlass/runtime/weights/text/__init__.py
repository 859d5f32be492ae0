"""The tokenizer, chat template and stop tokens of a checkpoint of any format. No torch."""
