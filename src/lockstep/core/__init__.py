"""Plain data and small services that every layer shares: specs, records, errors. No torch."""
