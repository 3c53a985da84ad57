"""How the bundled example data set and its tokenizer are made."""
