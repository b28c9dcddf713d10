"""The process group, collectives, failure handling and launching."""
