"""`tether serve`: the native engine behind HTTP routes, for clients, for evaluation and for training through `ServerEngine`."""
