"""Plain data and small services every layer shares: specs, records, errors, run folders. No torch."""
