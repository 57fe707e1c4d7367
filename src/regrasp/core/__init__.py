"""What every layer shares: outcomes, scales, provenance and errors. numpy only."""
