"""Messages to prompts, by the tokenizer's own template."""
