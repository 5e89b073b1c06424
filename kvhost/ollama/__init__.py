"""What is particular of an Ollama: what it says of itself, and what can be said of it. Pure."""
