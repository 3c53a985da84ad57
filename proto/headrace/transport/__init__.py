"""How payload gets from the preprocessor that decoded it to the rank that needs it; `base` has the contract."""
