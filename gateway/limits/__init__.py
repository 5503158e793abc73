"""Limits of tenants, of their keys and of what they ask of a route: reserved before, settled after.

All of it holds over every gateway, since one script in Redis decides (`reserve.lua`).
"""

from gateway.limits.limiter import Limiter as Limiter
from gateway.limits.refusal import LimitReachedError as LimitReachedError
from gateway.limits.reservation import NO_TOKENS as NO_TOKENS
from gateway.limits.reservation import Demand as Demand
from gateway.limits.reservation import Reservation as Reservation
