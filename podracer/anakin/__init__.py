"""Anakin: acting, environment and learning in one program."""
