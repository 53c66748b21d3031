"""What a run reads, leaves on disk, and how it goes on."""
