"""Cost tables: what every sample of a data set costs in every unit of a model."""
