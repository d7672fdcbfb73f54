"""Programs written by a model, scored by the tests they pass in a sandbox."""
