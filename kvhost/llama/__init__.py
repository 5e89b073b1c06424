"""What is particular of llama.cpp's server: slots, their files, what is asked of it. Pure."""
