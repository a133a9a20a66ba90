"""Text in and out of the model: tokenizer, chat prompts, detokenizing, stop strings, reasoning and tool parsers. No
torch.
"""
