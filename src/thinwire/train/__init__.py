"""The trainer: Hugging Face models on real text, K workers, one run folder."""
