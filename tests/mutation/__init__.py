"""Mutation testing: draw small random changes of the code and report those that no test notices."""
