"""The server: requests of several protocols, the jobs that they become, and what generates them."""
