"""`headrace experiment`: the papers' experiments by name, each with what Headrace computes beside what was published."""
