"""What tests share: oracles, samples, layouts, tiny models, probes of the simulator."""
