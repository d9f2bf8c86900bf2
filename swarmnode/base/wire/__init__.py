"""Generated from proto/swarmnode/v1 by `make proto`. Do not edit."""
