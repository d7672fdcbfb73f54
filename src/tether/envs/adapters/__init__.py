"""Environments of other packages, as Tether's: one module a package, found by the name in front of the colon (`catalog`)."""
