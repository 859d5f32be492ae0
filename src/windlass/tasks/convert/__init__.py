"""Converting checkpoints: quantization and file formats, streamed row by row in bounded memory."""
