"""The generated pages and pictures of the documents: `python -m scripts.docs` writes them."""
