"""What a load test has shown, as one page of HTML, as pictures and as tables."""
