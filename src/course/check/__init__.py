"""Gates: workers that run solutions, judges that measure them, and what is found."""
