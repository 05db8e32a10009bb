"""The compressed cache: `rows` and `calls` keep the books, `layer` compresses, `hf` and `hooks` meet transformers."""
