"""Questions of the user's own from a file, graded by exact match, as mathematics, by tests, or by a function of the user's."""
