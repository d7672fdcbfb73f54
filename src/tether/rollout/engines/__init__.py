"""Engines: whatever samples responses for dialogues. `native` decodes on the learner's own weights."""
