"""`headrace doctor`: what is wrong with an installation or a running stack, and the remedy. Nothing here changes anything."""
