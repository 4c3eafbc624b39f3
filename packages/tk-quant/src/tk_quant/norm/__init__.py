"""RMSNorm, plain and with a cast, and its backward."""
