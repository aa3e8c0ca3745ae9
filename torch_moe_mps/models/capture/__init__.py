"""A token as one call: the operators of a model's call for a few new tokens, recorded once."""
