"""A module for each family of operators. Their functions stand in `torch_moe_mps.ops`."""
