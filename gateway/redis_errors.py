"""How a call to Redis can fail for reasons that are not the caller's."""

from redis.exceptions import RedisError

REDIS_ERRORS = (RedisError, OSError, TimeoutError)
