"""An invented world: an encyclopedia of short articles that agree with one another, and questions whose answers stand in it."""
