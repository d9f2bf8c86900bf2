"""Text becomes numbered samples (design section 9)."""
