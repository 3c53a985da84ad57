"""How many preprocessors the jobs of a service need, and what starts and ends them."""
