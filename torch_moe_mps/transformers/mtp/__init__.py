"""MTP layers (multi-token prediction), which draft tokens: loaded, quantised and run."""
