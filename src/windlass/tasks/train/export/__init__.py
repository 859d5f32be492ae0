"""A trained model or adapter as Hugging Face and PEFT files."""
