"""Evaluations that training does not wait for: another process takes the weights of each step."""
