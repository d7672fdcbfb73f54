"""The command line: one file per verb. Arguments are parsed and checked before torch is imported, so help and mistakes are instant."""
