"""GGUF files of llama architecture, read into the same objects as a Hugging Face directory."""
