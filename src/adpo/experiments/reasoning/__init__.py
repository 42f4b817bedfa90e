"""The paper's third experiment: a language model that learns to reason from verifiable rewards."""
