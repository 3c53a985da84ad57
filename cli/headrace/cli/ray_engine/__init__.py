"""`headrace preprocessor --engine ray`: preprocessors that a Ray cluster hosts, as many as the trainers take from."""
