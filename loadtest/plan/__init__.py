"""From a measured knee to a number of replicas, and to what should watch them."""
