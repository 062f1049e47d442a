"""Sebulba: actor threads step host environments, and a learner loop learns from their rollouts."""
