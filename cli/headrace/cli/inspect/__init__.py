"""`headrace inspect`: what a data set holds, and its samples as the model will see them."""
