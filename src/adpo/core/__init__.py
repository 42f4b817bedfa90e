"""The paper's mathematics on ``[groups, K]`` tables: targets, divergences, temperature, objective, presets."""
