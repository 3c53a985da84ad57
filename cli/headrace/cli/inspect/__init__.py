"""`headrace inspect`: reports what a data set holds, and shows its samples as the model will see them."""
