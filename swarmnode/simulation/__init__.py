"""The same node in a world of our making: virtual time, simulated ports, one seed a life (design section 10)."""
