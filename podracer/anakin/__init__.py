"""Anakin: acting, environment and learning in one program, and one update of it as a pure function."""

from podracer.anakin.loop import Member
from podracer.anakin.pure_update import StepReport, Update, update

__all__ = ["Member", "StepReport", "Update", "update"]
